// A DLPack producer that does what mock_producer.py tells it to.
#include "tensor/dlpack_abi.h"

extern "C" {

// From Python's C API, whose headers are not needed for one function.
void PyErr_SetString(void* type, const char* text);

otk::dlpack::Tensor mock_tensor;  // how the next tensor is described
void* mock_error;                 // the exception that is set, or null
int mock_status;                  // what is returned

// A chain of `count` tables, the newest first, then `last`. Kept for the life of the process.
const void* mock_chain(const uint32_t* majors, const bool* has_function, int count,
                       const otk::dlpack::ExchangeHeader* last) {
  using namespace otk::dlpack;
  const auto describe = [](void*, Tensor* out) {
    *out = mock_tensor;
    if (mock_error != nullptr) PyErr_SetString(mock_error, "this producer fails");
    return mock_status;
  };
  for (int i = count - 1; i >= 0; --i) {
    auto* table = new ExchangeApi{};
    table->header = {{majors[i], 0}, last};
    table->dltensor_from_py_object_no_sync = has_function[i] ? static_cast<int (*)(void*, Tensor*)>(describe) : nullptr;
    last = &table->header;
  }
  return last;
}

// Makes the last table of a chain point back to its first.
void mock_close_loop(otk::dlpack::ExchangeHeader* first) {
  auto* last = first;
  while (last->prev_api != nullptr) last = const_cast<otk::dlpack::ExchangeHeader*>(last->prev_api);
  last->prev_api = first;
}

}  // extern "C"
