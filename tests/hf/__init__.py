"""Tests of ``ckpt_hf``."""
