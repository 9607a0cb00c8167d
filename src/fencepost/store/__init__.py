"""Where streams are kept: one contract, one write path, and the engines that fulfil them."""
