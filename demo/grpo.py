"""Group-relative policy optimisation: advantages from groups of answers to one prompt, and the clipped loss.

Formulas: Shao et al. 2024 (DeepSeekMath), equations 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) rewards and group ids -> (B,) advantages: per group, minus its mean, over its population deviation.

    A group whose answers all earned the same has nothing to compare and gets zeros.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    count = torch.bincount(group).to(rewards.dtype)
    mean = torch.zeros_like(count).index_add_(0, group, rewards) / count
    centred = rewards - mean[group]
    variance = torch.zeros_like(count).index_add_(0, group, centred.square()) / count
    return centred / (variance.sqrt()[group] + 1e-4)


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Sums over tokens, so that micro-batches of one step add up."""

    loss: Tensor
    """Differentiable; divide by the tokens of the whole step."""
    kl: float
    clipped: float
    """How many tokens had the clip take effect."""


def clipped_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    kl_weight: float,
) -> LossTerms:
    """Sum over the masked tokens of the clipped surrogate plus `kl_weight` times the KL estimate to the reference.

    All but `advantages` (B,) are (B, R). The KL estimate is exp(d) - d - 1 with d = ref - new: unbiased, never
    negative (Schulman, "Approximating KL divergence", k3).
    """
    ratio = (log_probs - old_log_probs).exp()
    weight = advantages[:, None]
    plain, bounded = ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight
    gap = ref_log_probs - log_probs
    kl = (gap.exp() - gap - 1) * mask
    surrogate = torch.minimum(plain, bounded) * mask
    return LossTerms(
        loss=kl_weight * kl.sum() - surrogate.sum(),
        kl=float(kl.detach().sum()),
        clipped=float(((bounded < plain) * mask).sum()),
    )
