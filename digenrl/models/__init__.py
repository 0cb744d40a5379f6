"""The model families behind one contract, and the stochastic step."""
