"""Models to train and to plan with, each written for one device and with a builder that takes its sizes."""
