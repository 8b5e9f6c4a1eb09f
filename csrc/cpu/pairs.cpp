// Tokens and segments dealt out to the threads. A result depends on its own rows alone.
#include "pairs.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace grpo {

namespace {

constexpr int64_t kTokens = 16;   // of a task
constexpr int64_t kSegments = 16;
constexpr int64_t kAhead = 4;  // rows on their way: those of the weight lie anywhere in memory

constexpr float kLowest = -std::numeric_limits<float>::infinity();

void prefetch_row(const Matrix& x, int64_t index) {
  constexpr int64_t kLine = 64;
  const char* row = static_cast<const char*>(x.row(index));
  for (int64_t at = 0; at < x.columns * item_bytes(x.dtype); at += kLine) __builtin_prefetch(row + at);
}

template <class F>
void parallel_ranges(int64_t count, int64_t size, F&& f) {
  const int64_t tasks = ceil_div(count, size);
  parallel_tasks(tasks, worker_count(tasks), [&](int64_t task, int64_t worker) {
    f(task * size, std::min(count, (task + 1) * size), worker);
  });
}

void score_set(const CandidateSets& sets, int64_t token, float* z, const Statistics& out) {
  const int64_t begin = sets.offsets[token], end = sets.offsets[token + 1];
  float max = kLowest;
  for (int64_t k = begin; k < end; k++) {
    float x = (z[k] + (sets.bias ? sets.bias[sets.ids[k]] : 0.0f)) * sets.scale;
    if (sets.softcap != 0) x = sets.softcap * std::tanh(x / sets.softcap);
    z[k] = x / sets.temperature[token];
    if (z[k] > max) max = z[k];
  }
  // without the maximum's own 1, so that a confident token keeps its digits
  double rest = 0, weighted = 0, target = 0;
  int64_t at_max = 0;
  for (int64_t k = begin; k < end; k++) {
    const float shifted = z[k] == kLowest ? kLowest : z[k] - max;
    if (sets.ids[k] == sets.targets[token]) target = shifted;
    if (shifted == 0) {
      at_max++;
      continue;
    }
    const float e = std::exp(shifted);
    rest += e;
    if (e != 0) weighted += static_cast<double>(e) * shifted;
  }
  rest += at_max - 1;
  out.set(token, max, rest, weighted, target);
}

// row += sum, rounded to the row's dtype; fp16 needs F16C, which every processor with AVX2 has.
__attribute__((target("f16c"))) void add_to_row(Dtype dtype, void* row, const float* sum, int64_t columns) {
  auto* words = static_cast<uint16_t*>(row);
  if (dtype == Dtype::fp32) {
    auto* out = static_cast<float*>(row);
    for (int64_t c = 0; c < columns; c++) out[c] += sum[c];
  } else if (dtype == Dtype::bf16) {
    for (int64_t c = 0; c < columns; c++) {
      uint32_t bits = static_cast<uint32_t>(words[c]) << 16;
      float x;
      std::memcpy(&x, &bits, 4);
      words[c] = bf16_of(x + sum[c]);
    }
  } else {
    for (int64_t c = 0; c < columns; c++) words[c] = _cvtss_sh(_cvtsh_ss(words[c]) + sum[c], _MM_FROUND_TO_NEAREST_INT);
  }
}

}  // namespace

void score_sets(const CandidateSets& sets, const Matrix& hidden, const Matrix& weight, const int64_t* index, float* z,
                const Statistics& out) {
  const Kernels& kernels = *machine().kernels;
  const int64_t count = sets.offsets[sets.tokens];
  parallel_ranges(sets.tokens, kTokens, [&](int64_t first, int64_t last, int64_t) {
    for (int64_t token = first; token < last; token++) {
      for (int64_t k = sets.offsets[token]; k < sets.offsets[token + 1]; k++) {
        if (k + kAhead < count) prefetch_row(weight, index[k + kAhead]);
        z[k] = kernels.row_product(hidden.dtype, hidden.row(token), weight.row(index[k]), hidden.columns);
      }
      score_set(sets, token, z, out);
    }
  });
}

void differentiate_sets(const CandidateSets& sets, const float* z, const Statistics& statistics, const float* dlogp,
                        const float* dentropy, float* out) {
  parallel_ranges(sets.tokens, 8 * kTokens, [&](int64_t first, int64_t last, int64_t) {
    for (int64_t token = first; token < last; token++) {
      const float slope = dlogp[token], entropy_slope = dentropy ? dentropy[token] : 0.0f;
      const float factor = sets.scale / sets.temperature[token];
      for (int64_t k = sets.offsets[token]; k < sets.offsets[token + 1]; k++) {
        if (slope == 0 && entropy_slope == 0) {
          out[k] = 0;
          continue;
        }
        float log_p = z[k] - statistics.max[token] - statistics.log_sum[token];
        if (log_p < kLowestLogp) log_p = kLowestLogp;
        const float p = std::exp(log_p);
        // 1 - p of the target from expm1: a confident token's gradient keeps its digits
        float dz = slope * (sets.ids[k] == sets.targets[token] ? -std::expm1(statistics.logp[token]) : -p);
        if (dentropy) dz -= entropy_slope * p * (log_p + statistics.entropy[token]);
        if (sets.softcap != 0) {
          const float share = z[k] * sets.temperature[token] / sets.softcap;
          dz *= 1 - share * share;
        }
        out[k] = dz * factor;
      }
    }
  });
}

void add_segment_sums(const Matrix& out, const int64_t* rows, const Matrix& x, const int64_t* index,
                      const float* factor, const int64_t* offsets, int64_t segments) {
  const Kernels& kernels = *machine().kernels;
  const int64_t count = offsets[segments], workers = worker_count(ceil_div(segments, kSegments));
  const WorkerBuffers<float> sums(workers, round_up(x.columns, 16));
  parallel_ranges(segments, kSegments, [&](int64_t first, int64_t last, int64_t worker) {
    float* sum = sums.of(worker);
    for (int64_t s = first; s < last; s++) {
      std::fill(sum, sum + x.columns, 0.0f);
      for (int64_t k = offsets[s]; k < offsets[s + 1]; k++) {
        if (k + kAhead < count) prefetch_row(x, index[k + kAhead]);
        if (factor[k] != 0) kernels.add_row(x.dtype, sum, x.row(index[k]), factor[k], x.columns);
      }
      add_to_row(out.dtype, out.row(rows[s]), sum, x.columns);
    }
  });
}

}  // namespace grpo
