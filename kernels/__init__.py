"""Operations on tensors, one folder each: a plain reference defines it, kernels compute it."""
