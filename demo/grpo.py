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


def divergence(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(B, R): KL(policy || reference) of what may come next at each token, from two (B, R, vocabulary).

    The sum over the vocabulary, not an estimate from the token that was sampled: never negative, and without the
    variance of exp(ref - new) - (ref - new) - 1 (k3), which a sample that the policy has become sure not to repeat
    blows up. Amini, Vieira and Cotterell 2025 ("Better Estimation of the Kullback-Leibler Divergence Between Language
    Models", arXiv 2504.10637), section 4: the Rao-Blackwellised estimate, and that its gradient is that of the
    divergence.
    """
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)


def stand_ins(advantages: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) how many rows each row stands for in the divergence; 0 for those that are not looked at.

    Rows of a group that teaches something are looked at anyway, and count once. In other groups nothing depends on the
    row but the divergence, and all are answers to one prompt: one of them stands for all.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(group)
    told = torch.zeros_like(size).index_add_(0, group, (advantages != 0).to(size.dtype)) > 0
    rows = torch.arange(len(group))
    first = torch.full_like(size, len(group)).scatter_reduce_(0, group, rows, "amin")
    return torch.where(told[group], 1, torch.where(rows == first[group], size[group], 0))


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
    divergences: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    kl_weight: float,
) -> LossTerms:
    """Sum over the masked tokens of the clipped surrogate plus `kl_weight` times the divergence from the reference.

    All but `advantages` (B,) are (B, R). `mask` says how often a token counts: once, or for the rows that its row
    stands for.
    """
    ratio = (log_probs - old_log_probs).exp()
    weight = advantages[:, None]
    plain, bounded = ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight
    kl = divergences * mask
    surrogate = torch.minimum(plain, bounded) * mask
    return LossTerms(
        loss=kl_weight * kl.sum() - surrogate.sum(),
        kl=float(kl.detach().sum()),
        clipped=float(((bounded < plain) * mask).sum()),
    )
