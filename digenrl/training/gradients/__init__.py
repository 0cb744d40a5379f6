"""Sums of gradients whose bits do not depend on order or on who computed them."""
