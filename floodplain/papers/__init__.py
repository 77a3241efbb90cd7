"""Figures of the three papers, simulated: what each claims, and what comes out here."""
