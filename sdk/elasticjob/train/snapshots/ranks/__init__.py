"""Exchange between the ranks: their process group, and copies of parts on other nodes."""
