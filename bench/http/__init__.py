"""A small HTTP engine and a load generator, cheap enough not to be what is measured."""
