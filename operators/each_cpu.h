// A function that is compiled for several instruction sets, of which the CPU's best runs; and bf16, as such functions
// read and write it. No product is fused with a sum, so that each gives the same bits.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11 && !defined(__clang__)
#define EACH_CPU __attribute__((target_clones("default", "avx2", "avx512f"), optimize("fp-contract=off")))
#else
#define EACH_CPU
#endif

namespace {

EACH_CPU void widen(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

EACH_CPU void narrow(const float* from, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    to[i] = (from[i] == from[i] ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16;  // to even; NaN stays
  }
}

}  // namespace
