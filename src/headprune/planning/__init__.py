"""Planning: every producer of a plan, from scores and budgets to the heads that stay."""
