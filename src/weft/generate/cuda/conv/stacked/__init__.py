"""Convolutions with the 1x1 convolution behind them."""
