"""Sweeps over very many streams: reclaiming claims, retention."""
