"""The lab: experiments that run something real in seconds and compute what there is to learn."""
