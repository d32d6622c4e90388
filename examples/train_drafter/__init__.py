"""Train a DFlash drafter for any target ddtree runs: corpus, features, train, evaluate."""
