"""Inputs that broke caches, content hashes and plugins elsewhere, and the tests here that hold each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CASES = """
 1  tensors in a list hashed as one stream          keys/test_calls.py::test_where_lists_of_tensors_are_cut_counts
 2  shape left out of the key                       keys/test_tensor_key.py::test_what_differs_is_not_equal
 3  integer-like floats met integers                keys/test_list_keys.py::test_any_value
 4  list, tuple, dict with the same items met       keys/test_calls.py::test_no_tensor_key_equals_a_list_key
 5  objects keyed by repr                           keys/test_refusals.py::test_refused
 6  large arrays hashed by sample                   keys/test_hash.py::test_lengths_to_4_mib
 7  a mask left out of the key                      keys/test_tensor_key.py::test_every_single_flip_of_a_mask_counts
 8  other options of the call left out              keys/test_calls.py::test_any_call_with_tensors
 9  0-d tensors                                     keys/test_tensor_key.py::test_reference_agrees
10  strided input                                   keys/test_layout.py::test_layout_does_not_count
11  row and column order gave two keys              keys/test_layout.py::test_row_and_column_order_of_the_same_values_have_one_key
12  empty tensors                                   keys/test_tensor_key.py::test_tensors_without_elements_have_keys
13  uint16 to uint64                                keys/test_tensor_key.py::test_attributes
14  numpy() of a device tensor                      keys/test_device.py::test_on_a_device
15  fake tensors                                    keys/test_refusals.py::test_refused
16  DTensor and other subclasses                    keys/test_transforms.py::test_dtensor
17  numpy arrays                                    keys/test_list_keys.py::test_values_of_note
18  a clone never hit                               keys/test_tensor_key.py::test_equal_tensors_have_equal_keys_wherever_they_live
19  stale after an edit in place                    keys/test_tensor_key.py::test_content_decides_after_an_edit_in_place
20  a key kept gigabytes alive                      activation/test_threads.py::test_100_000_distinct_calls_leave_memory_flat
21  the cache kept a pipeline alive                 activation/test_lifetimes.py::test_nothing_keeps_a_pipeline_or_its_parts_alive
22  the output was the caller's buffer              test_outputs.py::test_a_hit_returns_what_was_encoded_whatever_is_written_afterwards
23  a cached value was edited by its consumer       test_verify.py::test_what_no_guard_can_see_is_found
24  hashes differed by process                      activation/test_ranks.py::test_all_ranks_make_the_same_digests
25  one rank hit, another missed                    activation/test_ranks.py::test_all_ranks_decide_and_count_the_same
26  no device guard                                 cuda/test_gpu.py::test_devices
27  a host copy read before it was done             cuda/test_gpu.py::test_what_is_queued_before_is_read
28  a synchronization during graph capture          cuda/test_unit.py::test_nothing_is_launched_while_the_stream_is_captured
29  CUDA touched at import                          activation/test_failures.py::test_cuda_is_not_touched
30  two threads inserted at capacity                activation/test_threads.py::test_every_call_gets_its_own_answer_and_is_counted
31  a compiled caller                               activation/test_threads.py::test_a_compiled_caller_gets_right_results
32  one mode at the miss, another at the hit        test_outputs.py::test_torchs_state_is_part_of_the_lookup_of_calls_with_tensors
33  the plugin was not loaded, and nothing said so  environments/test_doctor.py::test_doctor
34  loaded twice, loaded in many threads            activation/test_failures.py::test_many_threads_register_while_another_imports
35  an exception of the plugin ended the engine     activation/test_failures.py::test_nothing_that_breaks_here_stops_the_process
36  upstream's function changed                     activation/test_contract.py::test_it_stands_down_or_follows
37  the function was imported by name before        activation/test_lifetimes.py::test_a_name_that_was_imported_earlier_leads_here
38  undefined symbols, wrong tags, missing sources  keys/test_packaging.py::test_the_binary_needs_no_symbol_of_torch
39  stale after weights or an adapter were loaded   freshness/test_events.py::test_a_change_is_never_stale
39  the same                                        freshness/test_lora.py::test_an_adapter_of_the_text_encoder_changes
40  sleep left entries on the device                freshness/test_worker.py::test_the_cache_is_empty_before_the_allocator_sleeps
41  no RPC reached the cache                        freshness/test_worker.py::test_the_calls_by_name
42  a counter that could not be read was 0          freshness/test_worker.py::test_a_runner_without_a_cache_is_left_alone
"""  # noqa: E501
LINES = CASES.strip("\n").splitlines()


def test_no_case_is_left_out() -> None:
    assert {int(line[:2]) for line in LINES} == set(range(1, 43))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:2].strip())
def test_each_case_has_its_test(line: str) -> None:
    path, name = line.split()[-1].split("::")
    assert re.search(rf"^def {name}\(", Path(__file__).parent.joinpath(path).read_text(), re.MULTILINE)
