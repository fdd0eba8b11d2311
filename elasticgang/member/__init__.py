"""One rank's part in the job: steps, votes, and the way from generation to generation."""
