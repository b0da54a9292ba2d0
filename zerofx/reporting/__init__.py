"""What `zerofx.compile(record=...)` writes, and what people see of it: the HTML report and the terminal's tables."""
