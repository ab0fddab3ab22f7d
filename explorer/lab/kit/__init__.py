"""What experiments stand on: small nets, a segmented engine, a bench, a process of their own."""
