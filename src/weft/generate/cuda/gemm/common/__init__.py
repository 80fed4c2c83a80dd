"""What templates of products share: the product that a problem is, its operands, its epilogue."""
