// Package csisuite has how csi-sanity meets the driver: in which combinations, with which settings,
// and which of its specs may be skipped for which reason. The suite on simulated racks and the
// conformance program share it.
package csisuite
