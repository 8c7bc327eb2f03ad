"""Mixture-of-experts layers over several ranks: loads, plans and exchanges."""
