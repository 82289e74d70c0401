"""Weights, configs and adapters in Hugging Face's formats, for any decoder that is
registered.
"""
