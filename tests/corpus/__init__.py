"""Corpus of packages that training scripts import: each job runs cold and warm."""
