"""The doctor's checks, by topic; ``registry.CHECKS`` lists them."""
