// Types and bounds of numbers, for all sources.
#pragma once

namespace grpo {

// The last two: of quantised weights only.
enum class Dtype { fp32, bf16, fp16, int8, fp8 };

constexpr int item_bytes(Dtype dtype) {
  return dtype == Dtype::fp32 ? 4 : dtype == Dtype::int8 || dtype == Dtype::fp8 ? 1 : 2;
}

// The floor of log-probs, nats: what an impossible token counts as, and log 0 where it is multiplied by 0.
constexpr float kLowestLogp = -1.0e4f;

}  // namespace grpo
