"""Training of learned routers, behind `python -m oval_core.training`: what they learn from, how, and what they hit."""
