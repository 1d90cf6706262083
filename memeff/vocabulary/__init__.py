"""Compute the log-sum-exp of a vocabulary's logits and the logits of labels, tile by tile.

This is attention with a key for each word and without values. The rows of x are T tokens, the
columns of the kernel V words, and a tile has t tokens and c words. For one tile:
  (1) raw = x k                              (4) p = exp(s - lse)
  (2) s = cap(raw + bias)                    (5) ds = p dlse + [word = label] dhit + dtotal
  (3) m' = max(m, rowmax s)                      d_raw, dbias, dcap = (2) transposed at ds
      l = l exp(m - m') + rowsum exp(s - m') (6) dx_i += d_raw k_j';  dk_j += x_i' d_raw
      hit += s of the label
      total += rowsum s
  at the end: lse = m + log l
(1) to (3) are the forward (loops.py). The gradient (loops.py) starts from lse and repeats (1) and
(2). The tangent of lse is the row sum of p ds, with ds from (2) along the tangents. `TileSum` adds
it up, and makes the derivatives of every order from it (derivatives.py).

Source: Milakov & Gimelshein 2018 (arXiv:1805.02867), algorithm 3; Wijmans et al. 2024
(arXiv:2411.09009), section 4.
"""
