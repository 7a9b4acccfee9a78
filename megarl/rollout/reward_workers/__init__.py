"""Worker processes that compute verdicts, and end when they exceed their limits of time or memory."""
