"""Problems longer than those trained on."""
