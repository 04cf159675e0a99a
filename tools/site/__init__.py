"""A coordinator that is a device of a coordinator above it (`fedquilt serve --site`)."""
