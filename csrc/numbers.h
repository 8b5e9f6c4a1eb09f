// Types and bounds of numbers, for all sources.
#pragma once

namespace grpo {

// The last three: of quantised weights only. An item of half_bytes is a byte, two numbers.
enum class Dtype { fp32, bf16, fp16, int8, fp8, half_bytes };

constexpr int item_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp32: return 4;
    case Dtype::bf16: case Dtype::fp16: return 2;
    default: return 1;
  }
}

// The floor of log-probs, nats: what an impossible token counts as, and log 0 where it is multiplied by 0.
constexpr float kLowestLogp = -1.0e4f;

}  // namespace grpo
