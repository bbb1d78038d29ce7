"""AdaLN and gated residuals in existing code become calls of the fused op, in memory or on disk."""
