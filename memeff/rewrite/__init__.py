"""Find attention that a program writes out, and replace it by `memeff.dot_product_attention`."""
