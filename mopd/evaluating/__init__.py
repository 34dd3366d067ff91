"""`mopd evaluate`: which models there are, how each is asked, and what comes of their answers."""
