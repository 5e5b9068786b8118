// Package report is the report of one run of oxide-conformance against a rack.
//
// [Write] writes a report into a folder: report.json for programs (its JSON Schema is
// report.schema.json in this package), junit.xml for CI, and index.html for people, one page that
// loads nothing and runs no script. [Read] reads a folder back, and [Diff] compares two reports.
//
// No file contains a secret that the caller has passed to Write.
package report
