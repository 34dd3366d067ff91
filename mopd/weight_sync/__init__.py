"""From the trainer's weights to the rollout engines', verified."""
