"""Log-probabilities over the set of ids that sampling kept: what the engine really drew from.

Legend: N rows of tokens, M kept ids in all, V vocabulary.
"""

import torch


def kept_logprobs(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    mask_starts: torch.Tensor,
    mask_ids_M: torch.Tensor,
) -> torch.Tensor:
    """[N]: of each row's label, renormalised over the row's kept ids; over all ids without any.

    Labels must lie in the vocabulary and, where a row keeps ids, be one of them. Row i keeps
    ``mask_ids_M[mask_starts[i]:mask_starts[i + 1]]``.
    """
    scaled_NV = logits_NV / temperatures_N[:, None]
    counts_N = mask_starts.diff()
    row_M = torch.repeat_interleave(torch.arange(len(counts_N)), counts_N)
    kept_M = scaled_NV[row_M, mask_ids_M]
    # The largest kept logit of each row is taken off before the exponential, and added again.
    peak_N = torch.full_like(temperatures_N, -torch.inf)
    peak_N = peak_N.scatter_reduce(0, row_M, kept_M.detach(), "amax")
    is_kept_N = counts_N > 0
    peak_N = torch.where(is_kept_N, peak_N, 0)
    total_N = torch.zeros_like(peak_N).index_add(0, row_M, torch.exp(kept_M - peak_N[row_M]))
    over_kept_N = peak_N + torch.log(torch.where(is_kept_N, total_N, 1))
    over_all_N = torch.logsumexp(scaled_NV, dim=-1)
    chosen_N = scaled_NV.gather(1, labels_N[:, None])[:, 0]
    return chosen_N - torch.where(is_kept_N, over_kept_N, over_all_N)


def kept_divergence(
    logits_NV: torch.Tensor,
    temperatures_N: torch.Tensor,
    mask_starts: torch.Tensor,
    mask_ids_M: torch.Tensor,
    mask_logprobs_M: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N]: KL(engine ‖ trainer) over each row's kept ids, and whether the engine reported them.

    Σ q · (log q − log p) with the engine's q and the trainer's p, both over the kept ids. An id
    that the engine never draws adds nothing. Rows without reported logprobs have 0.
    """
    scaled_NV = logits_NV / temperatures_N[:, None]
    counts_N = mask_starts.diff()
    row_M = torch.repeat_interleave(torch.arange(len(counts_N)), counts_N)
    kept_M = scaled_NV[row_M, mask_ids_M]
    totals_N = torch.full_like(temperatures_N, -torch.inf)
    for row in range(len(counts_N)):
        if counts_N[row]:
            totals_N[row] = torch.logsumexp(kept_M[mask_starts[row] : mask_starts[row + 1]], 0)
    scores_M = mask_logprobs_M.to(kept_M.dtype)
    terms_M = scores_M.exp() * (scores_M - (kept_M - totals_N[row_M]))
    terms_M = torch.where(torch.isneginf(scores_M), 0, terms_M)
    is_unknown_M = torch.isnan(scores_M)
    unknown_N = torch.zeros_like(counts_N).index_add(0, row_M, is_unknown_M.long())
    is_reported_N = (counts_N > 0) & (unknown_N == 0)
    terms_M = torch.where(is_reported_N[row_M], terms_M, 0)
    return torch.zeros_like(temperatures_N).index_add(0, row_M, terms_M), is_reported_N
