// What a processor multiplies if all operands are in registers: GFLOP/s of one instruction on so many threads.
//   registers INSTRUCTION THREADS    prints the best of some rounds; fails if the processor lacks the instruction
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSums = 12;  // independent ones: more than an instruction's latency

// Each returns the FLOP that it did. The compiler must not see that nothing is read.
template <class Vector>
inline __attribute__((always_inline)) void keep(Vector& x) {
  __asm__ volatile("" : "+v"(x));
}

__attribute__((target("avx2,fma"))) double fma_256(int64_t steps) {
  __m256 sums[kSums] = {}, a = _mm256_set1_ps(1e-9f);
  for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; j++) {
      sums[j] = _mm256_fmadd_ps(a, a, sums[j]);
      keep(sums[j]);
    }
  }
  return 2.0 * 8 * kSums * static_cast<double>(steps);
}

__attribute__((target("avx512f"))) double fma_512(int64_t steps) {
  __m512 sums[kSums] = {}, a = _mm512_set1_ps(1e-9f);
  for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; j++) {
      sums[j] = _mm512_fmadd_ps(a, a, sums[j]);
      keep(sums[j]);
    }
  }
  return 2.0 * 16 * kSums * static_cast<double>(steps);
}

__attribute__((target("avx512f,avx512bf16"))) double bf16_512(int64_t steps) {
  __m512 sums[kSums] = {};
  const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; j++) {
      sums[j] = _mm512_dpbf16_ps(sums[j], a, a);
      keep(sums[j]);
    }
  }
  return 2.0 * 32 * kSums * static_cast<double>(steps);
}

#if __has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>)
// Four sums in tiles 0 to 3, of all products of tiles 4 and 5 with 6 and 7.
__attribute__((target("amx-tile,amx-bf16"))) double amx(int64_t steps) {
  alignas(64) uint8_t shapes[64] = {1};  // palette 1; then 64 bytes a row and 16 rows for each of 8 tiles
  for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
  alignas(64) uint16_t numbers[512];
  std::fill(std::begin(numbers), std::end(numbers), uint16_t{0x3c00});
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, numbers, 64);
  _tile_loadd(5, numbers, 64);
  _tile_loadd(6, numbers, 64);
  _tile_loadd(7, numbers, 64);
  for (int64_t i = 0; i < steps; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 2.0 * 16 * 16 * 32 * 4 * static_cast<double>(steps);
}

bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
double amx(int64_t) { return 0; }
bool may_use_tiles() { return false; }
#endif

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// GFLOP/s of all threads together, the best of ten rounds: other programs only make it slower.
double rate(double (*work)(int64_t), int threads) {
  constexpr int64_t kSteps = 400'000;
  constexpr int kRounds = 10;
  std::vector<double> starts(static_cast<size_t>(threads)), ends(starts), flop(starts);
  std::barrier together(threads);
  double best = 0;
  const auto rounds = [&](int thread) {
    const auto at = static_cast<size_t>(thread);
    for (int round = 0; round < kRounds; round++) {
      together.arrive_and_wait();
      starts[at] = seconds();
      flop[at] = work(kSteps);
      ends[at] = seconds();
      together.arrive_and_wait();
      if (thread > 0) continue;
      double all = 0;
      for (const double x : flop) all += x;
      const double begin = *std::min_element(starts.begin(), starts.end());
      best = std::max(best, all / (*std::max_element(ends.begin(), ends.end()) - begin));
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; thread++) others.emplace_back(rounds, thread);
  rounds(0);
  for (std::thread& other : others) other.join();
  return best / 1e9;
}

}  // namespace

int main(int count, char** words) {
  __builtin_cpu_init();
  const std::string name = count == 3 ? words[1] : "";
  double (*work)(int64_t) = nullptr;
  if (name == "AMX" && may_use_tiles()) work = amx;
  if (name == "AVX512-BF16" && __builtin_cpu_supports("avx512bf16")) work = bf16_512;
  if (name == "AVX-512 FMA" && __builtin_cpu_supports("avx512f")) work = fma_512;
  if (name == "AVX2 FMA" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) work = fma_256;
  if (work == nullptr) return 1;
  std::printf("%.1f\n", rate(work, std::atoi(words[2])));
}
