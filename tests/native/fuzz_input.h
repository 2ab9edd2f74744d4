// The fuzzer's bytes, read as numbers of the kinds that break code. Past the end every byte is 0.
#pragma once

#include "support.h"

namespace otk::test {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <class Number>
  Number raw() {
    Number number{};
    const size_t taken = size_ < sizeof number ? size_ : sizeof number;
    if (taken > 0) memcpy(&number, data_, taken);
    data_ += taken;
    size_ -= taken;
    return number;
  }

  // 0 to n - 1.
  uint32_t below(uint32_t n) { return raw<uint8_t>() % n; }
  bool one_in(uint32_t n) { return below(n) == n - 1; }

  // A number from -4 to 11, or, one time in 16, one near a power of two, an extreme or anything.
  int64_t number() {
    const uint8_t choice = raw<uint8_t>();
    if (choice < 240) return choice % 16 - 4;
    switch (choice % 4) {
      case 0:
        return static_cast<int64_t>((uint64_t{1} << below(64)) + below(3) - 1);
      case 1:
        return -static_cast<int64_t>(uint64_t{1} << below(63));
      case 2:
        return below(2) == 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
      default:
        return raw<int64_t>();
    }
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace otk::test
