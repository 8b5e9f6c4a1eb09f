"""The GRPO objective on log-probs, in torch: the loss of each token, its coefficients, metrics, custom objectives."""
