"""OVAL for LLaVA-family models: images live in pages of their own, and a question reads few of them."""
