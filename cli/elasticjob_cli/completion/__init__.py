"""Shell completion: candidates for a word, and the scripts of the shells.

The shells' scripts and kubectl call `elasticjob __complete WORD... INCOMPLETE`. Each line of the
output has a candidate, a tab and its description. The last line is `:0` if files are candidates,
`:4` if they are not. This is the protocol of kubectl's own completion.
"""
