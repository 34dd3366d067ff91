"""The objective: pure functions of tensors, with the formula and its source beside each.

    orm, shaping, gae       outcome rewards to advantages      advantage     the token's advantage
    policy_losses           what an advantage makes of log pi  truncation    trainer against engine
    divergence              whole distributions                reference_kl  toward a reference
    aggregation, balance    weights of sequences and domains   schedules     values over the steps
    loss                    they meet                          stats         metrics

A new variant is one function, one line in a dict and its names in `mopd.objective_names`.
"""
