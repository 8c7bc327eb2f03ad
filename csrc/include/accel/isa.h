// Which instruction set the CPU kernels run with: the widest that this CPU has, or the one named by
// ACCEL_CPU_ISA=baseline|avx2|avx512. Read once, at the first call.
#pragma once

namespace accel {

enum class Isa { baseline, avx2, avx512 };

// Throws if ACCEL_CPU_ISA names something unknown, or something that this CPU cannot run.
Isa isa();
const char* isa_name(Isa);

// What this CPU has beside, whatever ACCEL_CPU_ISA says: conversions to bf16 in 512 bits, and oneDNN's
// products of bf16 in tiles.
bool cpu_has_avx512_bf16();
bool cpu_has_amx();

}  // namespace accel
