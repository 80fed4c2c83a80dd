"""Convolutions with the pooling behind them."""
