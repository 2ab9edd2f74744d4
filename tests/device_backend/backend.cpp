// "otkdev": a torch device for tests on machines that have no accelerator.
//
// It takes torch's PrivateUse1 slot and has two devices, both backed by host
// memory. Three things make it behave like a real accelerator to its users:
//
//  * Every byte is stored XOR-ed with kPoison, and only a copy through torch
//    decodes it. Code that takes the data pointer for host memory reads wrong
//    bytes, so a test that compares results notices.
//  * Views, allocation and copies are implemented here; every other operator
//    runs on the CPU through torch's boxed fallback and comes back encoded.
//  * Copies to the host are counted. What the fallback moves back and forth
//    to emulate an operator would never leave a real device: not counted.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <utility>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceType kType = DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};
constexpr DeviceIndex kDevices = 2;
constexpr std::uint8_t kPoison = 0xA5;

thread_local DeviceIndex current_device = 0;  // per thread, as CUDA has it
thread_local c10::StreamId current_stream[kDevices] = {};
bool hide_streams = false;  // as torch does with CUDA's where a backend like this one is registered
thread_local bool emulating = false;          // inside an operator that runs on the CPU

std::atomic<std::uint64_t> host_copies{0};
std::atomic<std::uint64_t> host_bytes{0};

DeviceIndex exchange_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "otkdev has no device ", int{index});
  return std::exchange(current_device, index);
}

// ---------------------------------------------------------------- device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  // A stream is a number, and everything on it is done when a call returns.
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, current_stream[device.has_index() ? device.index() : current_device]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return hide_streams ? nullptr : reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// With the hooks registered torch treats the device as an accelerator, which is
// what the vendors' own backends look like (torch.accelerator, lazy init).
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchange_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  // Any host memory is as good as pinned memory here.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    // A plain byte copy into the new allocation keeps the bytes encoded.
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool hooks_registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = bytes == 0 ? nullptr : std::malloc(bytes);
    TORCH_CHECK(data != nullptr || bytes == 0, "otkdev: out of memory");
    return {data, data, &std::free, Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &allocator)

// ---------------------------------------------------------------- copies

// The encoded elements of a device tensor as a CPU tensor that shares their
// memory. Its dtype is one whose copies keep every bit pattern: an encoded
// bool, say, is not a valid bool.
at::Tensor encoded_alias(const at::Tensor& tensor) {
  at::ScalarType bits = at::kByte;
  switch (tensor.element_size()) {
    case 1: break;
    case 2: bits = at::kShort; break;
    case 4: bits = at::kInt; break;
    case 8: bits = at::kLong; break;
    case 16: bits = at::kComplexDouble; break;
    default: TORCH_CHECK(false, "otkdev: unexpected element size");
  }
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), bits);
}

// Encodes plain bytes and decodes encoded ones, in place.
void flip(const at::Tensor& contiguous) {
  auto* bytes = static_cast<std::uint8_t*>(contiguous.mutable_data_ptr());
  std::for_each(bytes, bytes + contiguous.nbytes(), [](std::uint8_t& byte) { byte ^= kPoison; });
}

// Conjugate and negative views keep their elements as they are and carry a
// flag; the aliases above do not see it. Applying it twice undoes it.
at::Tensor apply_flags_of(const at::Tensor& view, at::Tensor values) {
  if (view.is_conj()) values = values.conj_physical();
  if (view.is_neg()) values = values.neg();
  return values;
}

at::Tensor download(const at::Tensor& source) {
  const at::Tensor bytes = encoded_alias(source).clone(at::MemoryFormat::Contiguous);
  flip(bytes);
  return apply_flags_of(source, bytes.view(source.scalar_type()));
}

void upload(const at::Tensor& values, const at::Tensor& target) {
  // A new tensor every time: flip() must not reach the caller's own memory.
  at::Tensor staged = at::empty(target.sizes(), at::dtype(target.scalar_type()).device(at::kCPU));
  staged.copy_(values);  // converts and broadcasts
  staged = apply_flags_of(target, staged).contiguous();
  flip(staged);
  at::Tensor alias = encoded_alias(target);
  alias.copy_(staged.view(alias.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  if (target.numel() == 0) return target;
  const bool from_device = source.is_privateuseone();
  const bool to_device = target.is_privateuseone();
  if (from_device && !to_device && !emulating) {
    ++host_copies;
    host_bytes += source.nbytes();
  }
  const at::Tensor values = from_device ? download(source) : source;
  if (to_device) {
    upload(values, target);
  } else {
    target.copy_(values);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// ---------------------------------------------------------------- operators

Device device_or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kType, current_device);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // A result that is no tensor (item(), equal()) does reach the host, on a real
  // device as well, so the reads behind it count.
  const auto& returns = op.schema().returns();
  const bool only_tensors = std::all_of(returns.begin(), returns.end(), [](const auto& result) {
    const auto kind = result.type()->kind();
    return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  });
  struct Scope {
    bool before;
    ~Scope() { emulating = before; }
  } scope{std::exchange(emulating, emulating || only_tensors)};
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  // Views only rearrange metadata; torch's own kernels do that on any device.
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

// torch would first resolve a conjugate or negative view for a _copy_from that
// knows no such flags, by copying it, which asks for _copy_from again, forever.
// copy_from() knows them.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

// ---------------------------------------------------------------- for ctypes

extern "C" {
std::uint64_t otkdev_host_copies() { return host_copies; }
std::uint64_t otkdev_host_bytes() { return host_bytes; }
std::int64_t otkdev_exchange_stream(int device, std::int64_t stream) {
  return std::exchange(current_stream[device], stream);
}
void otkdev_hide_streams(bool hide) { hide_streams = hide; }
void otkdev_reset_counters() { host_copies = host_bytes = 0; }
}
