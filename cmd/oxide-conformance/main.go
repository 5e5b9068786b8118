// oxide-conformance runs the suite against the rack that OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT
// name. It is run as root in an instance of that project, and touches only what it made itself.
package main

import (
	"context"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity"
)

func main() {
	os.Exit(sanity.Conformance(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
