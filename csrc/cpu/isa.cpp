#include "accel/isa.h"

#include <array>
#include <cstdlib>
#include <string>

#include <torch/library.h>
#include <torch/version.h>

#include "accel/check.h"

namespace accel {
namespace {

constexpr std::array kWidestFirst = {Isa::avx512, Isa::avx2, Isa::baseline};

// Must name every extension that for_each_isa.h turns on for that instruction set.
bool cpu_has(Isa isa) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  switch (isa) {
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
          cpu_has(Isa::avx2);
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
          __builtin_cpu_supports("f16c");
    case Isa::baseline:
      return true;
  }
#endif
  return isa == Isa::baseline;
}

Isa choose() {
  const char* requested = std::getenv("ACCEL_CPU_ISA");
  for (Isa isa : kWidestFirst) {
    if (requested == nullptr || *requested == '\0') {
      if (cpu_has(isa)) return isa;
    } else if (requested == std::string(isa_name(isa))) {
      ACCEL_CHECK(cpu_has(isa), "ACCEL_CPU_ISA=", requested, ", but this CPU or build has no ",
                  requested, " kernels; unset it to use the widest that runs here");
      return isa;
    }
  }
  ACCEL_CHECK_VALUE(false, "ACCEL_CPU_ISA must be baseline, avx2 or avx512, got ", requested);
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: return "baseline";
  }
  return "unknown";
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
bool cpu_has_avx512_bf16() { return __builtin_cpu_supports("avx512bf16"); }
bool cpu_has_amx() { return __builtin_cpu_supports("amx-bf16"); }
#else
bool cpu_has_avx512_bf16() { return false; }
bool cpu_has_amx() { return false; }
#endif

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_native_torch_version() -> str", [] { return std::string(TORCH_VERSION); });
  m.def("_native_isa() -> str", [] { return std::string(isa_name(isa())); });
}

}  // namespace accel
