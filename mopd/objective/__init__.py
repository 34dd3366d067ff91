"""The objective: pure functions of tensors, with the formula and its source beside each.

orm (ORM advantages of groups), advantage (the token's advantage), truncation (train-rollout
correction), aggregation (per-token terms to one number), mopd_loss (they meet), stats (metrics).
New variants are one function and one line in a dict.
"""
