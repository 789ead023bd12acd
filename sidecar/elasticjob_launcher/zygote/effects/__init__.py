"""Detection of the lasting effects of an import, which workers would share."""
