// Package csisuite configures csi-sanity for the driver: the combinations, their settings, and
// the specs that may be skipped with a reason. The suite on simulated racks and the conformance
// program share it.
package csisuite
